"""Settings of a run: arguments, files, environment variables, devices."""
