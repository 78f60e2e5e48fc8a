/* What a cubin says of itself: its sections, and the figures that ptxas also prints (-v).
 *
 * A cubin is an ELF file of 64 bits. Section .nv.info has records about all functions, section
 * .nv.info.NAME those about one, whose code is the section that sh_info names. A record is a
 * format, an attribute and a value of 16 bits; in format 4 the value is a size, and that many bytes
 * follow. Registers and stack are such records, of several functions that share the code the same.
 * Spills are instructions of the code that have the annotation "spill or refill"; compilers before
 * CUDA 12.9 write none. */
#include <elf.h>

#include "compile.h"

enum { SIZED = 4, FRAME_SIZE = 0x11, REGISTERS = 0x2f, API_VERSION = 0x37, ANNOTATIONS = 0x55 };
enum { SPILL = 1, ANNOTATED_SINCE = 129 }; /* a kind of annotation; CUDA 12.9 */

void pm_cubin_free(pm_cubin *c) {
  pm_free(c->image);
  pm_free(c->log);
  *c = (pm_cubin){0};
}

static uint32_t word(const unsigned char *at) {
  uint32_t x;
  memcpy(&x, at, sizeof x);
  return x;
}

/* ---- sections ------------------------------------------------------------------------------ */

static bool read_section(const pm_sections *s, uint32_t k, Elf64_Shdr *out) {
  if (k >= s->n) return false;
  memcpy(out, s->base + s->table + k * sizeof *out, sizeof *out);
  return out->sh_type == SHT_NOBITS ||
         (out->sh_offset <= s->size && s->size - out->sh_offset >= out->sh_size);
}

bool pm_sections_of(const void *image, size_t size, pm_sections *out) {
  Elf64_Ehdr head;
  *out = (pm_sections){.base = image, .size = size};
  if (size < sizeof head) return false;
  memcpy(&head, image, sizeof head);
  if (memcmp(head.e_ident, ELFMAG, SELFMAG) || head.e_ident[EI_CLASS] != ELFCLASS64 ||
      head.e_shentsize != sizeof(Elf64_Shdr) || head.e_shoff > size ||
      (size - head.e_shoff) / sizeof(Elf64_Shdr) < head.e_shnum)
    return false;
  out->table = head.e_shoff;
  out->n = head.e_shnum;
  Elf64_Shdr names;
  if (read_section(out, head.e_shstrndx, &names) && names.sh_size &&
      !out->base[names.sh_offset + names.sh_size - 1]) {
    out->names = (const char *)out->base + names.sh_offset;
    out->names_size = names.sh_size;
  }
  return true;
}

bool pm_section_at(const pm_sections *s, uint32_t k, pm_section *out) {
  Elf64_Shdr h;
  if (!read_section(s, k, &h)) return false;
  *out = (pm_section){.name = h.sh_name < s->names_size ? s->names + h.sh_name : "",
                      .at = s->base + h.sh_offset,
                      .size = h.sh_type == SHT_NOBITS ? 0 : h.sh_size,
                      .code_of = h.sh_info,
                      .is_code = h.sh_type == SHT_PROGBITS && h.sh_flags & SHF_EXECINSTR};
  return true;
}

/* ---- records ------------------------------------------------------------------------------- */

/* The next record; false: there is none. */
static bool next_record(const unsigned char **at, const unsigned char *end, uint32_t *attribute,
                        const unsigned char **value, uint32_t *size) {
  if (end - *at < 4) return false;
  const bool sized = (*at)[0] == SIZED;
  *attribute = (*at)[1];
  *value = *at + 4;
  *size = sized ? word(*at) >> 16 : 0;
  if (end - *value < (ptrdiff_t)*size) return false;
  *at = *value + *size;
  return true;
}

/* Bytes that a lane moves by a load or store of local memory: bits 73 to 75 of the instruction. */
static int64_t access_bytes(const pm_section *code, uint32_t offset) {
  static const uint8_t bytes[] = {1, 1, 2, 2, 4, 8, 16, 16};
  if (code->size < 16 || offset > code->size - 16) return 0;
  return bytes[word(code->at + offset + 8) >> 9 & 7];
}

typedef struct figures {
  int64_t registers, stack, spills;
  uint32_t version;
} figures;

static void read_info(const pm_section *info, const pm_section *code, figures *f) {
  const unsigned char *at = info->at, *value;
  uint32_t attribute, size;
  while (next_record(&at, info->at + info->size, &attribute, &value, &size)) {
    if (attribute == REGISTERS && size >= 8)
      f->registers = pm_max(f->registers, (int64_t)word(value + 4));
    if (attribute == FRAME_SIZE && size >= 8) f->stack = pm_max(f->stack, (int64_t)word(value + 4));
    if (attribute == API_VERSION && size >= 4) f->version = word(value);
    for (uint32_t k = 0; attribute == ANNOTATIONS && k + 8 <= size; k += 8)
      if (word(value + k) == SPILL) f->spills += access_bytes(code, word(value + k + 4));
  }
}

void pm_cubin_figures(pm_cubin *c) {
  figures f = {.registers = -1, .stack = -1};
  pm_sections sections;
  pm_section info, code;
  if (!pm_sections_of(c->image, c->size, &sections)) return;
  for (uint32_t k = 0; k < sections.n; k++) {
    if (!pm_section_at(&sections, k, &info) || strncmp(info.name, ".nv.info", 8)) continue;
    if (!info.name[8] || !pm_section_at(&sections, info.code_of, &code)) code = (pm_section){0};
    read_info(&info, &code, &f);
  }
  const bool knows_spills = f.version >= ANNOTATED_SINCE || !f.stack;
  if (c->registers < 0) c->registers = (int)f.registers;
  if (c->stack_bytes < 0) c->stack_bytes = (int)f.stack;
  if (c->spill_bytes < 0 && knows_spills) c->spill_bytes = (int)f.spills;
}
