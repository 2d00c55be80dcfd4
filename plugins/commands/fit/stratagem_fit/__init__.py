"""A whole run from one file: `stratagem fit run.yaml`, the file's schema, and completion for shells."""
