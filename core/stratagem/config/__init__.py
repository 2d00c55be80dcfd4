"""What the user asked for: arguments, files, environment variables, devices."""
