"""One file a verb: options in, sentences and tables out.  What a verb knows is elsewhere."""
