/* Logarithm, sine and cosine of random words, for normal values; written once for CPU and GPU: the
 * including file defines RULE, which precedes each function.
 *
 * Initial weights should be the same on every machine, but libm's functions are not: glibc selects
 * variants by processor, and versions differ in the last bits. The functions here therefore use
 * plain fp64 operations, and both builds forbid fusing them, so only IEEE arithmetic determines the
 * bits. Their error is below 1e-12, far below fp32 rounding errors.
 */

/* log of k / 2^32 for k in 1 .. 2^32 */
RULE double log_fraction(double k)
{
    uint64_t bits, reduced;
    memcpy(&bits, &k, sizeof bits);
    /* k = m * 2^e with m in [sqrt(1/2), sqrt(2)) */
    int64_t e = (int64_t)((bits + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu)) >> 52) - 1023;
    reduced = bits - ((uint64_t)e << 52);
    double m;
    memcpy(&m, &reduced, sizeof m);
    double s = (m - 1) / (m + 1), z = s * s; /* log m = 2 atanh(s); z < 0.0295 */
    double series = 1.0 / 15;
    series = series * z + 1.0 / 13;
    series = series * z + 1.0 / 11;
    series = series * z + 1.0 / 9;
    series = series * z + 1.0 / 7;
    series = series * z + 1.0 / 5;
    series = series * z + 1.0 / 3;
    return (double)(int)(e - 32) * 0x1.62e42fefa39efp-1 + (s + s * z * series) * 2;
}

/* cos and sin of 2 pi w / 2^32 */
RULE void turn(uint32_t w, double *cos_out, double *sin_out)
{
    uint32_t quarter = (w + 0x20000000u) >> 30; /* the nearest; 4 wraps to 0 */
    double t = (double)(int32_t)(w - (quarter << 30)) * 0x1.921fb54442d18p-30; /* |t| <= pi / 4 */
    double z = t * t;
    double s = -1.0 / 39916800 + z * (1.0 / 6227020800);
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    s = t + t * z * s;
    double c = 1.0 / 479001600 - z * (1.0 / 87178291200);
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = 1 + z * (c * z - 0.5);
    double x = quarter & 1 ? s : c, y = quarter & 1 ? c : s;
    *cos_out = quarter == 1 || quarter == 2 ? -x : x;
    *sin_out = quarter & 2 ? -y : y;
}
