"""What strategies share that hold parameters as DTensors: device meshes, shards, initial values, FSDP2's units."""
