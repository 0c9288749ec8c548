/* tokenizer_sentencepiece.c - reads tokenizer.model, a protobuf message (ModelProto of the
 * SentencePiece project).
 *
 * Only the fields that change the result are read, and only BPE models; everything else that would
 * change it is refused by name. The reader implements the part of the wire format that this message
 * needs: every length is checked against what is left, and nesting is that of the message.
 * Thread: the builder's. */
#include <string.h>

#include "shared/text/tokenizer/tokenizer_internal.h"

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };
enum { MODEL_PIECE = 1, MODEL_TRAINER = 2, MODEL_NORMALIZER = 3, MODEL_DENORMALIZER = 5 };
enum { PIECE_TEXT = 1, PIECE_SCORE = 2, PIECE_KIND = 3 };
enum {
    TRAINER_KIND = 3,
    TRAINER_AS_SUFFIX = 24,
    TRAINER_BYTES = 35,
    TRAINER_BOS = 41,
    TRAINER_EOS = 42
};
enum {
    NORMALIZER_SPEC_TABLE = 2,
    NORMALIZER_SPEC_PREFIX = 3,
    NORMALIZER_SPEC_EXTRA = 4,
    NORMALIZER_SPEC_ESCAPE = 5
};
enum { KIND_BPE = 2 };

/* ---- wire format ---- */

struct proto_field {
    uint32_t number;
    uint64_t value;   /* varints and fixed numbers */
    struct str bytes; /* WIRE_BYTES */
};

static bool take_varint(struct str *in, uint64_t *out)
{
    unsigned char c;
    *out = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (!str_take(in, &c, 1)) return false;
        *out |= (uint64_t)(c & 0x7F) << shift;
        if (c < 0x80) return true;
    }
    return false;
}

static bool take_fixed(struct str *in, size_t n, uint64_t *out)
{
    unsigned char c[8];
    if (!str_take(in, c, n)) return false;
    *out = 0;
    for (size_t i = n; i > 0; i--) *out = *out << 8 | c[i - 1];
    return true;
}

/* Takes the next field off *in; ERR_FORMAT when it is damaged. Loop while in->n > 0. */
static enum status take_field(struct str *in, struct proto_field *f, struct err *err)
{
    uint64_t tag, len;
    *f = (struct proto_field){ 0 };
    bool good = take_varint(in, &tag) && tag >> 3 != 0 && tag >> 3 <= UINT32_MAX;
    f->number = good ? (uint32_t)(tag >> 3) : 0;
    switch (good ? (int)(tag & 7) : -1) {
    case WIRE_VARINT: good = take_varint(in, &f->value); break;
    case WIRE_64: good = take_fixed(in, 8, &f->value); break;
    case WIRE_32: good = take_fixed(in, 4, &f->value); break;
    case WIRE_BYTES:
        good = take_varint(in, &len) && len <= in->n;
        if (!good) break;
        f->bytes = str_sub(*in, 0, (size_t)len);
        *in = str_sub(*in, (size_t)len, SIZE_MAX);
        break;
    default: good = false;
    }
    return good ? OK
                : err_set(err, ERR_FORMAT, "the file is not a SentencePiece model, or is damaged");
}

/* ---- the message ---- */

struct spm_model_file {
    struct spm_piece *pieces;
    size_t n, cap;
    struct str table;
    uint64_t kind;
    int32_t bos, eos;
    bool dummy_prefix, remove_extra, escape, as_suffix, byte_fallback;
};

static enum status read_piece(struct spm_model_file *m, struct str in, struct err *err)
{
    struct spm_piece p = { .kind = SPM_NORMAL };
    struct proto_field f;
    while (in.n > 0) {
        TRY(take_field(&in, &f, err));
        uint32_t bits = (uint32_t)f.value;
        if (f.number == PIECE_TEXT) p.text = f.bytes;
        if (f.number == PIECE_SCORE) memcpy(&p.score, &bits, sizeof p.score);
        if (f.number == PIECE_KIND) p.kind = f.value <= SPM_BYTE ? (int32_t)f.value : 0;
    }
    if (m->n == m->cap) {
        m->cap = m->cap ? m->cap * 2 : 4096;
        m->pieces = mem_realloc(m->pieces, m->cap, sizeof *m->pieces);
    }
    m->pieces[m->n++] = p;
    return m->n <= TOKENIZER_IDS_MAX
               ? OK
               : err_set(err, ERR_FORMAT, "the model has more than %d pieces", TOKENIZER_IDS_MAX);
}

/* Ids are varints; -1 (none) is a very large one. */
static int32_t id_of(uint64_t value) { return value < TOKENIZER_IDS_MAX ? (int32_t)value : -1; }

static enum status read_trainer(struct spm_model_file *m, struct str in, struct err *err)
{
    struct proto_field f;
    while (in.n > 0) {
        TRY(take_field(&in, &f, err));
        switch (f.number) {
        case TRAINER_KIND: m->kind = f.value; break;
        case TRAINER_AS_SUFFIX: m->as_suffix = f.value != 0; break;
        case TRAINER_BYTES: m->byte_fallback = f.value != 0; break;
        case TRAINER_BOS: m->bos = id_of(f.value); break;
        case TRAINER_EOS: m->eos = id_of(f.value); break;
        default: break;
        }
    }
    return OK;
}

static enum status read_normalizer(struct spm_model_file *m, struct str in, struct err *err)
{
    struct proto_field f;
    while (in.n > 0) {
        TRY(take_field(&in, &f, err));
        switch (f.number) {
        case NORMALIZER_SPEC_TABLE: m->table = f.bytes; break;
        case NORMALIZER_SPEC_PREFIX: m->dummy_prefix = f.value != 0; break;
        case NORMALIZER_SPEC_EXTRA: m->remove_extra = f.value != 0; break;
        case NORMALIZER_SPEC_ESCAPE: m->escape = f.value != 0; break;
        default: break;
        }
    }
    return OK;
}

static enum status check_denormalizer(struct str in, struct err *err)
{
    struct proto_field f;
    while (in.n > 0) {
        TRY(take_field(&in, &f, err));
        if (f.number == NORMALIZER_SPEC_TABLE && f.bytes.n > 0)
            return err_set(err, ERR_UNSUPPORTED,
                           "a SentencePiece model with a denormalizer is not supported");
    }
    return OK;
}

static enum status read_model(struct spm_model_file *m, struct str in, struct err *err)
{
    struct proto_field f;
    while (in.n > 0) {
        TRY(take_field(&in, &f, err));
        switch (f.number) {
        case MODEL_PIECE: TRY(read_piece(m, f.bytes, err)); break;
        case MODEL_TRAINER: TRY(read_trainer(m, f.bytes, err)); break;
        case MODEL_NORMALIZER: TRY(read_normalizer(m, f.bytes, err)); break;
        case MODEL_DENORMALIZER: TRY(check_denormalizer(f.bytes, err)); break;
        default: break;
        }
    }
    static const char *const kinds[] = { "", "unigram", "bpe", "word", "char" };
    if (m->n > 0 && m->kind != KIND_BPE)
        return err_set(err, ERR_UNSUPPORTED,
                       "a SentencePiece model of type %s is not supported (only bpe is)",
                       m->kind < COUNT_OF(kinds) ? kinds[m->kind] : "unknown");
    return OK;
}

enum status tokenizer_fill_sentencepiece(struct tokenizer *t, struct str file, struct err *err)
{
    /* Defaults of the protobuf definition. */
    struct spm_model_file m = {
        .kind = 1, .bos = 1, .eos = 2, .dummy_prefix = true, .remove_extra = true, .escape = true
    };
    enum status st = read_model(&m, file, err);
    if (st == OK) st = spm_set_charsmap(&t->spm, m.table, err);
    if (st == OK) {
        t->spm.dummy_prefix = m.dummy_prefix;
        t->spm.remove_extra = m.remove_extra;
        t->spm.escape = m.escape;
        t->spm.as_suffix = m.as_suffix;
        t->bos = (size_t)m.bos < m.n ? m.bos : -1;
        t->eos = (size_t)m.eos < m.n ? m.eos : -1;
        st = tokenizer_fill_spm(t, m.pieces, m.n, m.byte_fallback, err);
    }
    mem_free(m.pieces);
    return st;
}
