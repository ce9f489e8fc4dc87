"""What lessons run on live ranks beside their own code: wrong programs, a lecture's, paced steps, instruments."""
