"""What is installed: plugins, kinds of plugins, and the names that other trainers have for them."""
