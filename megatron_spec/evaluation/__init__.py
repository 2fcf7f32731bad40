"""How a draft is judged: acceptance statistics, validation runs, reports."""
