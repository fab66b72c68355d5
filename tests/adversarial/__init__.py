"""What nobody in his right mind would type, write or do, generated: see docs/reliability.md."""
