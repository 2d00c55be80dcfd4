"""`Trainer`: the loops of fit, validate, test and predict, and what a module, its data and its metrics are."""
