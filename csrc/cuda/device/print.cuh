// Numbers as text, as Python's format() writes them. `style` is six characters: fill, alignment
// (< > ^ =), sign (- + or a blank), '#' or '.', the separator of thousands (, _ or .) and the type
// ('.': none). A negative precision means none. The text is written to `out`, which is returned.

//! print_padded
// The sign, the prefix and the body of a number, `group` digits between separators in the first
// `digits` characters of the body, in a field of `width`.
struct Padded {
  char* out;
  i32 n;
  __device__ void put(char c) { out[n++] = c; }
  __device__ void put(char c, i32 times) { for (; times > 0; times--) put(c); }
};
__device__ __noinline__ static const char* print_padded(char* out, char sign, char prefix,
                                                        const char* body, i32 size, i32 digits,
                                                        i32 group, const char* style, i32 width) {
  Padded to = {out, 0};
  const char separator = style[4];
  const i32 separators = separator != '.' && digits > 0 ? (digits - 1) / group : 0;
  const i32 left = width - size - separators - (sign != 0) - (prefix ? 2 : 0);
  if (style[1] == '>') to.put(style[0], left);
  if (style[1] == '^') to.put(style[0], left / 2);
  if (sign) to.put(sign);
  if (prefix) to.put('0'), to.put(prefix);
  if (style[1] == '=') to.put(style[0], left);
  for (i32 k = 0; k < size; k++) {
    if (separators && k && k < digits && (digits - k) % group == 0) to.put(separator);
    to.put(body[k]);
  }
  if (style[1] == '<') to.put(style[0], left);
  if (style[1] == '^') to.put(style[0], left - left / 2);
  to.put(0);
  return out;
}

//! print_sign
FN char print_sign(bool negative, const char* style) {
  return negative ? '-' : style[2] == '-' ? (char)0 : style[2];
}

//! print_int
__device__ __noinline__ static const char* print_int(char* out, i64 x, const char* style,
                                                     i32 width) {
  const char type = style[5];
  const u64 base = type == 'b' ? 2 : type == 'o' ? 8 : type == 'x' || type == 'X' ? 16 : 10;
  char body[36];
  i32 size = 0;
  for (u64 left = x < 0 ? -(u64)x : (u64)x; left || !size; left /= base) {
    const i32 d = (i32)(left % base);
    for (i32 k = size++; k > 0; k--) body[k] = body[k - 1];
    body[0] = (char)(d < 10 ? '0' + d : (type == 'X' ? 'A' : 'a') + d - 10);
  }
  const char prefix = style[3] == '#' && base != 10 ? type : (char)0;
  return print_padded(out, print_sign(x < 0, style), prefix, body, size, size, base == 10 ? 3 : 4,
                      style, width);
}

//! Decimal
// Converts a positive number to 0.d d d ... * 10^point, exactly, by Dragon4 (Steele and White) on
// 224-bit integers. The number is r / s * 10^point. For the shortest digits that read back as the
// same number of its dtype, low and high are the permitted errors.
struct Wide {
  u32 at[7]; // least significant first
  __device__ void set(u64 x, i32 shift) {
    for (i32 k = 0; k < 7; k++) at[k] = 0;
    for (i32 k = 0; k < 64; k++)
      if (x >> k & 1) at[(k + shift) / 32] |= 1u << ((k + shift) % 32);
  }
  __device__ void times(u32 by) {
    u64 carry = 0;
    for (i32 k = 0; k < 7; k++) {
      carry += (u64)at[k] * by;
      at[k] = (u32)carry;
      carry >>= 32;
    }
  }
  // the sign of a + b - c
  static __device__ i32 compare(const Wide& a, const Wide& b, const Wide& c) {
    i64 carry = 0;
    bool rest = false;
    for (i32 k = 0; k < 7; k++) {
      carry += (i64)a.at[k] + b.at[k] - c.at[k];
      rest |= (u32)carry != 0;
      carry >>= 32;
    }
    return carry < 0 ? -1 : rest || carry;
  }
  __device__ void take(const Wide& x) {
    i64 carry = 0;
    for (i32 k = 0; k < 7; k++) {
      carry += (i64)at[k] - x.at[k];
      at[k] = (u32)carry;
      carry >>= 32;
    }
  }
};
struct Decimal {
  enum { MOST = 120 }; // digits; no float32 has more
  char digit[MOST + 1];
  i32 n, point;

  // n: number of digits; behind: digits after the point instead; both negative: the shortest
  __device__ __noinline__ void set(double x, i32 count, i32 behind, i32 bits, i32 least) {
    const u64 b = (u64)__double_as_longlong(x);
    u64 m = (b & 0xfffffffffffffull) | 1ull << 52;
    i32 e = (i32)(b >> 52) - 1075;
    while (!(m & 1)) m >>= 1, e++;
    i32 top = e;
    for (u64 left = m; left > 1; left >>= 1) top++;
    const i32 ulp = top - bits + 1 > least ? top - bits + 1 : least;
    const bool edge = m == 1 && ulp > least; // neighbours below a power of two are closer
    i32 low_at = ulp - 1 - (edge ? 1 : 0), base = e < low_at ? e : low_at;
    if (base > 0) base = 0;
    Wide r, s, low, high, none;
    r.set(m, e - base), s.set(1, -base), none.set(0, 0);
    low.set(1, low_at - base), high.set(1, ulp - 1 - base);
    const bool even = e > ulp || !(m >> (ulp - e) & 1), shortest = count < 0 && behind < 0;
    point = 0;
    while (Wide::compare(r, shortest ? high : none, s) >= (shortest && !even ? 1 : 0))
      s.times(10), point++;
    while (true) {
      Wide more = r, far = shortest ? high : none;
      more.times(10), far.times(10);
      if (Wide::compare(more, far, s) >= (shortest && !even ? 1 : 0)) break;
      r = more, point--;
      low.times(10), high.times(10);
    }
    if (count < 0) count = shortest ? (i32)MOST : behind + point;
    n = 0;
    i32 up = -1; // is the remainder above one half?
    while (n < count && n < MOST) {
      r.times(10), low.times(10), high.times(10);
      i32 d = 0;
      while (Wide::compare(r, none, s) >= 0) r.take(s), d++;
      digit[n++] = (char)d;
      if (!shortest) continue;
      const bool down = Wide::compare(r, none, low) < (even ? 1 : 0);
      const bool above = Wide::compare(r, high, s) >= (even ? 0 : 1);
      if (!down && !above) continue;
      if (!down || !above) up = above;
      break;
    }
    if (up < 0) { // round to nearest, ties to even
      const i32 half = count < 0 ? -1 : Wide::compare(r, r, s);
      up = half > 0 || (!half && n && digit[n - 1] % 2);
    }
    if (up) round_up(count);
    while (shortest && n > 1 && !digit[n - 1]) n--;
  }
  __device__ void round_up(i32 count) {
    i32 k = n - 1;
    while (k >= 0 && digit[k] == 9) digit[k--] = 0;
    if (k >= 0) {
      digit[k]++;
      return;
    }
    if (count == 0) n = 1;
    digit[0] = 1;
    point++;
  }
  __device__ char at(i32 k) const { return (char)('0' + (k >= 0 && k < n ? digit[k] : 0)); }
};

//! print_float
// Formats a number that is exact in `bits` bits, the last of which is worth at least 2^least. The
// body is written into the second part of `out`, after the room for the result.
__device__ __noinline__ static const char* print_float(char* out, double x, const char* style,
                                                       i32 width, i32 precision, i32 bits,
                                                       i32 least, char* body) {
  const char type = style[5] == 'n' ? 'g' : style[5], lower = (char)(type | 32);
  const bool repr = type == '.', percent = type == '%';
  const char upper = type >= 'A' && type <= 'Z' ? 32 : 0;
  const bool negative = (u64)__double_as_longlong(x) >> 63;
  Padded to = {body, 0};
  if (!(x - x == 0)) {
    const char* text = x != x ? "nan" : "inf";
    for (i32 k = 0; k < 3; k++) to.put((char)(text[k] - upper));
    if (percent) to.put('%');
    return print_padded(out, print_sign(negative && x == x, style), 0, body, to.n, 0, 3, style,
                        width);
  }
  if (negative) x = -x;
  if (percent) x *= 100;
  if (precision < 0 && !repr) precision = 6;
  const bool fixed = lower == 'f' || percent, general = repr || lower == 'g';
  if (general && precision == 0) precision = 1;
  Decimal d;
  d.n = 1, d.point = 1, d.digit[0] = 0;
  if (x > 0) {
    d.set(x, fixed ? -1 : precision < 0 ? -1 : lower == 'e' ? precision + 1 : precision,
          fixed ? precision : -1, bits, least);
  }
  const i32 last = precision < 0 ? 16 : precision - (repr ? 1 : 0);
  const bool exponent = lower == 'e' || (general && (d.point <= -4 || d.point > last));
  const i32 whole = exponent ? 1 : d.point;
  i32 behind = fixed || lower == 'e' ? precision : precision < 0 ? d.n - whole : precision - whole;
  if (general && style[3] != '#') { // no trailing zeros
    i32 end = d.n;
    while (end > 0 && !d.digit[end - 1]) end--;
    if (behind > end - whole) behind = end - whole;
  }
  if (repr && !exponent && behind < 1) behind = 1;
  if (behind < 0) behind = 0;
  if (whole < 1) to.put('0');
  for (i32 k = 0; k < whole; k++) to.put(d.at(k));
  const i32 digits = to.n;
  if (behind || style[3] == '#') to.put('.');
  for (i32 k = 0; k < behind; k++) to.put(d.at(whole + k));
  if (exponent) {
    const i32 e = x > 0 ? d.point - 1 : 0, far = e < 0 ? -e : e;
    to.put((char)('e' - upper)), to.put(e < 0 ? '-' : '+');
    to.put((char)('0' + far / 10)), to.put((char)('0' + far % 10));
  }
  if (percent) to.put('%');
  return print_padded(out, print_sign(negative, style), 0, body, to.n, digits, 3, style, width);
}
