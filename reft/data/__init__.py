"""Where training is in its data: an order that can be resumed."""
