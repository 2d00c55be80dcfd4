"""``stratagem run``: start a script on several devices and nodes, or submit it to a scheduler."""
