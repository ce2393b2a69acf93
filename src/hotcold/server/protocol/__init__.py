"""What clients send and get, as translations of plain data: JSON values to jobs, pieces of text to JSON
values. Nothing here knows HTTP, an event loop or an engine."""
