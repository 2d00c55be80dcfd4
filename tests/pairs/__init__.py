"""Features of a training step that meet: each pair of them trains as a plain loop of torch does, or is refused in words.

`features.py` declares each feature: what it adds to a user's program, and what it changes in the loop of `plain.py`.
"""
