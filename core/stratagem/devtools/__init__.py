"""For those who write plugins: checks of an installation, the skeleton of a new package, the matrix of combinations."""
