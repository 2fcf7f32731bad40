"""Evaluation of drafts: acceptance statistics, validation runs, reports."""
