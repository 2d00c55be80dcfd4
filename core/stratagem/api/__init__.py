"""All that a plugin may import: hooks, kinds, the context that hooks receive, and small libraries on plain data."""
