"""Commands that check an installation, and create, check and combine plugins."""
