"""Predict what a training run needs and costs, without the devices that it is planned for."""
