// The first position that a row at `position` attends to: the start of its last `window` positions or, if the
// highest bit is set, the last multiple of the remaining bits. 0: all.
const uint CHUNKED = 0x80000000u;

uint first_seen(uint position, uint window) {
    const uint size = window & ~CHUNKED;
    if (size == 0 || position < size) return 0;
    return (window & CHUNKED) != 0 ? position / size * size : position + 1 - size;
}
