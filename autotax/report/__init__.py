"""Reports: tables for people, documents for programs, and progress displays of runs."""
