"""Commands that check an installation, and begin, check and combine plugins."""
