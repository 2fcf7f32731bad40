"""What every process needs: process groups, platform, failure, files on disk, provenance."""
