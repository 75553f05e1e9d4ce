"""Drawing: recordings of steps, as pages and traces."""
