"""Decisions based on configurations only: layouts, fast paths, estimates of memory and compute. No torch."""
