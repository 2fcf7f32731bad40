"""Runtime services of every process: process groups, platform, failures, files on disk, provenance."""
