"""Plain values that everything else uses: problems, configs, conditions, settings, errors, search spaces."""
