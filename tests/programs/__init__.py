"""Programs that tests run: in a fork of a process that has imported torch, or in a terminal."""
