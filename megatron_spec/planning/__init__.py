"""Decisions made from configurations alone: layouts, fast paths, memory and work. No torch."""
