"""What a dry run imports, imported once by the server that dry runs are forked from.

Nothing here runs an operation: a fork must not inherit threads.
"""

import partita.observe.record
import partita.prove.observed
import partita.prove.stand_in
import partita.strategies.parallelize
import partita.train.build
import partita.train.data
import partita.train.step  # noqa: F401
