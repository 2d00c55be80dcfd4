"""What the pages of reports, plans and post-mortems share: scales, drawings as SVG, a page in one file, its colours."""
