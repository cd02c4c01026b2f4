"""The host half of batching: pages, plans, the scheduler.  Numbers only; no jax, no clock, no threads."""
