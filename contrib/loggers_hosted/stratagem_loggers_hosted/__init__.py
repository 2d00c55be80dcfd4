"""Log metrics and hyper-parameters to Comet, Aim, Trackio or ClearML: a module for each, on its client library."""
