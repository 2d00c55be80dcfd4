"""Communication hooks: gradient compression for bucket averaging, one method in each module."""
