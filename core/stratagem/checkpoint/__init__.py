"""Files that are whole or absent, and checks of the state that they hold."""
