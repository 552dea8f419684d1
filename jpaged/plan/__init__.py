"""`jpaged plan`: what a model needs on devices that are not here, and what it would do there."""
