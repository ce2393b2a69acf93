// Sums and maxima over the 256 invocations of a workgroup, in the same order on every device: one half is
// folded onto the other.
shared float folded[256];

float group_sum(float value) {
    const uint i = gl_LocalInvocationIndex;
    folded[i] = value;
    barrier();
    for (uint apart = 128; apart > 0; apart /= 2) {
        if (i < apart) {
            precise float sum = folded[i] + folded[i + apart];
            folded[i] = sum;
        }
        barrier();
    }
    const float sum = folded[0];
    barrier();
    return sum;
}

float group_max(float value) {
    const uint i = gl_LocalInvocationIndex;
    folded[i] = value;
    barrier();
    for (uint apart = 128; apart > 0; apart /= 2) {
        if (i < apart && folded[i + apart] > folded[i]) folded[i] = folded[i + apart];
        barrier();
    }
    const float largest = folded[0];
    barrier();
    return largest;
}
