"""What a client may ask, and how long the server waits: every limit with its reason.

A request is bounded before it costs anything: nobody can stop the event loop for others for long, or fill the engine's
memory, with a small body. What one of `MAX_SEQUENCES` takes in one piece is to send them to the engine: 0.03 s of a
CPU, and 0.1 s where the garbage collector runs meanwhile. A body of `MAX_BODY` bytes is parsed in one piece, too. What
is longer goes to threads, or lets others have their turn in between.
"""

# Sizes of a request

MAX_BODY = 10 * 2**20
"""Bytes of a body: room for millions of tokens, parsed in a fraction of a second."""
MAX_SENT = 2 * MAX_BODY
"""Bytes of what one request becomes for the engine: any prompt once, not a large one with parameters thousandfold."""
MAX_SEQUENCES = 4096
"""Prompts times `n`: each is a request of the engine's."""
MAX_CHOICES = 128
"""`n` and `best_of`, as in OpenAI's API."""
MAX_SCORED = 2**20
"""Log-probabilities of prompt tokens in one answer, those of likeliest ones included: seconds of work in Python."""
MAX_MESSAGES = 4096
"""Of a chat: templates render each in Python."""
MAX_TOOLS = 1024
"""Of a chat: each is in the prompt."""
MAX_TOOL_BYTES = 2**20
"""Of their JSON: templates print it in Python, and no model reads more."""
MAX_TOOL_CALLS = 1024
"""Of one message: the arguments of each are parsed."""
MAX_BIASES = 1024
"""Entries of `logit_bias` (OpenAI's API has 300): applied at every step."""
MAX_STOP_IDS = 1024
"""Token ids that end a request: compared at every step."""
MAX_STOPS = 64
"""Stop strings: every character of the output is matched against each."""
MAX_STOP_LENGTH = 1024
"""Characters of a stop string: so much output may be held back."""
MAX_BAD_WORDS = 256
"""`bad_words`: each is tokenised, and compared at every step."""
MAX_BAD_WORD = 256
"""Characters of each."""
MAX_ALLOWED = 2**20
"""`allowed_token_ids`: more than any vocabulary has."""
MAX_DOCUMENTS = 1024
"""`documents`: templates render each in Python."""
MAX_REQUEST_ID = 128
"""Characters of a request's id: it is in every line of the log."""
MAX_STOP_SEQUENCES = 4
"""`stop` in TGI's dialect: that and the next two are TGI's own limits, which /info tells."""
MAX_BEST_OF = 2
MAX_TOP_TOKENS = 5
MAX_NEW_TOKENS = 1024
"""`max_new_tokens` where none is given, as in TGI; less where less fits. A model need not come to an end by itself."""
USUAL_TOKENS = 16
"""`max_tokens` of /v1/completions where none is given, as in OpenAI's API; less where less fits."""
MAX_USER = 256
"""Characters of `user`: policies and metrics use it as a key."""
MAX_EXTRA = 64 * 2**10
"""Bytes of `extra`: each prompt carries it."""
MAX_GRAMMAR = 64 * 2**10
"""Bytes of a schema, regex, grammar or list of choices: each prompt carries it, and compiling it takes a while."""
MAX_TEXT = 2**20
"""Characters that /tokenize takes: a second of a thread, and 100 MB for what comes of them."""
MAX_TEXTS = 2
"""Those that are dealt with at once: what is to be generated needs the processor and the interpreter, too."""
MAX_TOKENS = 2**20
"""Token ids that /detokenize takes: decoding holds the interpreter, for 0.1 s."""
MAX_KEY = 1024
"""Characters of an API key."""
MAX_KEY_FILE = 2**20
"""Bytes of the file of API keys: a request is compared with each key."""
INLINE_TEXT = 4096
"""Characters that are tokenised in the event loop, in about a millisecond; longer texts go to a thread."""
INLINE_SCORES = 256
"""Log-probabilities and choices that are spelt in the event loop, in about a millisecond; more go to a thread."""
INLINE_PROMPT = 32
"""Characters that each prompt counts as beside its own."""
INLINE_TOKENS = 256
"""Output tokens of one response that become text before others have their turn: a few milliseconds."""

# Sizes of a connection

MAX_HEAD = 64 * 2**10
"""Bytes of a request line and headers, which are kept until the last of them is there. Proxies take 8 to 32 KiB."""
MAX_PIPELINED = 64
"""Requests that wait for their turn on one connection: each is kept, and one piece of data can hold thousands."""

MAX_TRIALS = 4
"""Grammars that are tried out at once: one that takes all its time shall not hold up the others."""
MAX_TRIALS_WAITING = 256
"""Those that wait for that, with their requests, and those that are tried out. Tenants take turns at places; once there
are so many, who has the most of them loses one to who has fewer."""
KEPT_VERDICTS = 4 * 2**20
"""Bytes of what is known of grammars that were tried out before."""

# Sizes of an answer to a bad request

MAX_PROBLEMS = 10
MAX_INPUT = 200
"""Characters of each value that is shown."""
MAX_MESSAGE = 2000
"""Characters of the whole message."""

# Seconds

RETRY_AFTER = 1
"""What is told who finds the queue full, which moves with every step, or the engine gone or not there yet."""
RECEIVE = 120
"""From the first byte of a request to its last: the largest over a line of a megabit per second. A connection on
which nothing comes at all may stay open for as long."""
KEEP_ALIVE = 75
"""An idle connection stays open longer than clients keep theirs: otherwise their next request can meet its end."""
STALLED_AFTER = 15
"""An engine is stalled that has neither sent anything nor computed for so long, though requests wait."""
TRIALS_START = 60
"""How much longer than the trial itself the first may take: a process has to start and to import torch."""
LAST_WORDS = 0.3
"""For the engine's own account of why it ended, once its process is gone."""
INTERRUPT = 1
"""How long clients have to take what tells them of the end: after Ctrl-C, and behind the time that SIGTERM gives."""
JOIN = 2.0
"""How long the end waits for a checkpoint that is being opened."""
