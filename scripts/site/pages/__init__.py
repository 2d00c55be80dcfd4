"""Each module writes pages of the site, as Markdown."""
