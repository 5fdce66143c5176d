"""Developer tools: test servers, reports, generated pages and checks. Not installed."""
