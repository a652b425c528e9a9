"""The page at `/`: HTML, CSS and ES modules, which `api.pages` serves."""
