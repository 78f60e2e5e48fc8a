/* Numbers as text in Python's formats, by the C library: what the catalogue's print_int and
 * print_float write. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <charconv>
#include <string>

#include "catalogue.h"

#undef printf

static const char *print_padded(char *out, bool negative, std::string body, size_t whole,
                                const std::string &prefix, size_t group, const char *style,
                                size_t width) {
  if (style[4] != '.') {
    for (size_t k = group; k < whole; k += group) body.insert(whole - k, 1, style[4]);
  }
  const std::string sign =
      (negative ? "-" : style[2] == '-' ? "" : std::string(1, style[2])) + prefix;
  const size_t size = sign.size() + body.size(), left = width > size ? width - size : 0;
  const size_t before = style[1] == '>' ? left : style[1] == '^' ? left / 2 : 0;
  const size_t inside = style[1] == '=' ? left : 0;
  strcpy(out, (std::string(before, style[0]) + sign + std::string(inside, style[0]) + body +
               std::string(left - before - inside, style[0]))
                  .c_str());
  return out;
}

extern "C" const char *print_int(char *out, i64 x, const char *style, i32 width) {
  const char type = style[5];
  const int base = type == 'b' ? 2 : type == 'o' ? 8 : (type | 32) == 'x' ? 16 : 10;
  char digits[72] = {};
  *std::to_chars(digits, digits + 71, x < 0 ? -(u64)x : (u64)x, base).ptr = 0;
  std::string body = digits;
  if (type == 'X') {
    for (char &c : body) c = (char)toupper(c);
  }
  const std::string prefix = style[3] == '#' && base != 10 ? std::string("0") + type : "";
  return print_padded(out, x < 0, body, body.size(), prefix, base == 10 ? 3 : 4, style,
                      (size_t)width);
}

/* The fewest digits that are x in its dtype, as Python's repr. */
static std::string shortest_text(double x, i32 bits, i32 least) {
  char buf[64] = {};
  std::string digits;
  int exponent = 0;
  for (int n = 1; n <= 9; n++) {
    snprintf(buf, sizeof buf, "%.*e", n - 1, x);
    const double back = strtod(buf, nullptr);
    int of_back = 0;
    frexp(back, &of_back);
    const double ulp = ldexp(1.0, of_back - bits > least ? of_back - bits : least);
    if (nearbyint(back / ulp) * ulp == x) break;
  }
  for (const char *c = buf; *c && *c != 'e'; c++) {
    if (*c != '.') digits += *c;
  }
  exponent = atoi(strchr(buf, 'e') + 1);
  while (digits.size() > 1 && digits.back() == '0') digits.pop_back();
  if (exponent < -4 || exponent >= 16) {
    snprintf(buf, sizeof buf, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    return digits.substr(0, 1) + (digits.size() > 1 ? "." + digits.substr(1) : "") + buf;
  }
  if (exponent < 0) return "0." + std::string((size_t)(-exponent - 1), '0') + digits;
  while (digits.size() < (size_t)exponent + 2) digits += '0';
  return digits.substr(0, (size_t)exponent + 1) + "." + digits.substr((size_t)exponent + 1);
}

extern "C" const char *print_float(char *out, double x, const char *style, i32 width, i32 precision,
                               i32 bits, i32 least, char *) {
  const char type = style[5] == 'n' ? 'g' : style[5];
  const bool negative = signbit(x) && x == x;
  std::string body;
  x = x != x ? NAN : fabs(x);
  if (type == '.' && precision < 0 && isfinite(x)) {
    body = shortest_text(x, bits, least);
  } else if (type == '.' && isfinite(x)) { /* as g, but with a point or an exponent */
    char text[1024];
    const int n = precision > 1 ? precision : 1;
    snprintf(text, sizeof text, "%.*e", n - 1, x);
    const int exponent = atoi(strchr(text, 'e') + 1);
    const bool far = exponent < -4 || exponent >= n - 1;
    snprintf(text, sizeof text, style[3] == '#' ? "%#.*e" : "%.*e", n - 1, x);
    if (!far) snprintf(text, sizeof text, "%.*f", n - 1 - exponent, x);
    body = text;
    const size_t end = body.find('e'), last = end == std::string::npos ? body.size() : end;
    if (style[3] != '#' && body.find('.') != std::string::npos) {
      size_t keep = body.find_last_not_of('0', last - 1) + 1;
      if (body[keep - 1] == '.') keep += far ? (size_t)-1 : 1;
      body.erase(keep, last - keep);
    }
  } else {
    char text[1024];
    const std::string format = std::string("%") + (style[3] == '#' ? "#" : "") + ".*" +
                               (type == '%' ? 'f' : type == '.' ? 'g' : type);
    snprintf(text, sizeof text, format.c_str(), precision < 0 ? 6 : precision,
             type == '%' ? x * 100 : x);
    body = text;
    if (type == '%') body += '%';
  }
  const size_t whole = isfinite(x) ? body.find_first_not_of("0123456789") : 0;
  return print_padded(out, negative, body, whole == std::string::npos ? body.size() : whole, "", 3,
                      style, (size_t)width);
}
