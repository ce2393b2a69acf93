// The first position that a row at `position` sees: of its last `window` ones; or, where the highest bit is set,
// of those from the last multiple of the rest on. 0: all.
const uint CHUNKED = 0x80000000u;

uint first_seen(uint position, uint window) {
    const uint size = window & ~CHUNKED;
    if (size == 0 || position < size) return 0;
    return (window & CHUNKED) != 0 ? position / size * size : position + 1 - size;
}
