"""SHOWING: tables for people, documents for programs, and what a run looks like while it goes on."""
