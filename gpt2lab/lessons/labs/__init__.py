"""Programs that lessons run on live ranks besides their own code: wrong ones, a lecture's, paced steps, instruments."""
