"""One room a strategy; a room is a folder with two doors.

``predict`` says, without torch, what the strategy divides, what it communicates and what it holds; ``apply`` does it
to a model.  The two are written independently and held together by proof.  Rooms do not read one another: what one
must know of the others stands in the ``Case``.
"""
