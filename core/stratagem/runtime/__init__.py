"""`Run`: one resolved stack of plugins at work in one process."""
