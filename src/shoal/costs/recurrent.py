"""Bytes that oneDNN's LSTM layer keeps for its backward pass: its workspace, which torch does not size on tensors without memory.

On the CPU torch runs an ``nn.LSTM`` of float32 or bfloat16 as one such layer for each layer and direction; a GRU, a plain RNN
and an LSTM of float64 are made of ordinary operations. The workspace holds these matrices, each on pages of its own::

    rows               columns                what it is
    T B                4 H, padded            gates
    T B                H, padded              outputs
    2 (T + 1) B        max(I, H), padded      states
    2 (T + 1) B        H                      cells
    2 (T + 1) B        max(I, H), padded      gradients of states, twice: of the layer and of the position before; float32
    2 (T + 1) B        H                      gradients of cells; float32

T positions, B samples, I inputs, H hidden. The form was read off the sizes that oneDNN gives out, to the byte. Another torch may
have another oneDNN: ``tests/unit/costs/test_saved.py`` would tell.
"""

_PAGE = 4096
_CACHE_LINE = 64
_FLOAT32 = 4


def lstm_workspace_bytes(*, positions: int, samples: int, inputs: int, hidden: int, itemsize: int) -> int:
    """Bytes of the workspace of one layer in one direction."""
    rows = positions * samples
    # One more than there are positions, for the state that comes from outside; of the layer and of its input.
    states = 2 * (positions + 1) * samples
    widest = max(inputs, hidden)
    sizes = [
        rows * _padded(4 * hidden, itemsize) * itemsize,
        rows * _padded(hidden, itemsize) * itemsize,
        states * _padded(widest, itemsize) * itemsize,
        states * hidden * itemsize,
        *[states * _padded(widest, _FLOAT32) * _FLOAT32] * 2,
        states * hidden * _FLOAT32,
    ]
    return sum(-(-size // _PAGE) * _PAGE for size in sizes)


def _padded(columns: int, itemsize: int) -> int:
    """Whole cache lines, and one more where rows would otherwise meet in the same sets of the cache."""
    line = _CACHE_LINE // itemsize
    columns = -(-columns // line) * line
    return columns + line if columns % 256 == 0 else columns
