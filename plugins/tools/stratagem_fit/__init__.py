"""Run from a configuration file: `stratagem fit run.yaml`, the schema of the file, and shell completion."""
