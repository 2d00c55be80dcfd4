"""Communication hooks: what gradients become on their way. Each room holds one way to send them."""
