"""What a plan is priced on: devices, links and clusters, by data sheet or as measured, and what a software reaches of them."""
