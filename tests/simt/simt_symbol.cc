/* simt_symbol.cc - looks a function up in the symbol table of the file that it was loaded from:
 * dladdr knows exported functions only, and kernels are static. Thread: any. */
#include "tests/simt/simt_symbol.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

static std::string find_in(const char *file, uintptr_t at)
{
    const ElfW(Ehdr) *e = (const ElfW(Ehdr) *)file;
    const ElfW(Shdr) *sections = (const ElfW(Shdr) *)(file + e->e_shoff);
    for (int i = 0; i < e->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const ElfW(Sym) *symbols = (const ElfW(Sym) *)(file + sections[i].sh_offset);
        const char *names = file + sections[sections[i].sh_link].sh_offset;
        for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++)
            if (at >= symbols[k].st_value && at < symbols[k].st_value + symbols[k].st_size &&
                (symbols[k].st_info & 0xf) == STT_FUNC)
                return names + symbols[k].st_name;
    }
    return "";
}

static std::string mangled_name(const void *f)
{
    Dl_info info;
    struct stat st;
    std::string name;
    if (!f || !dladdr(f, &info)) return name;
    const bool is_program = !strchr(info.dli_fname, '/') || access(info.dli_fname, R_OK) != 0;
    int fd = open(is_program ? "/proc/self/exe" : info.dli_fname, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return name;
    void *file = fstat(fd, &st) == 0
                     ? mmap(nullptr, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)
                     : MAP_FAILED;
    close(fd);
    if (file == MAP_FAILED) return name;
    const bool is_fixed = ((const ElfW(Ehdr) *)file)->e_type == ET_EXEC;
    name = find_in((const char *)file, (uintptr_t)f - (is_fixed ? 0 : (uintptr_t)info.dli_fbase));
    munmap(file, (size_t)st.st_size);
    return name;
}

/* Where the parameters begin, outside of template arguments. */
static size_t parameters_at(const std::string &name)
{
    int depth = 0;
    for (size_t i = 0; i < name.size(); i++) {
        depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
        if (name[i] == '(' && depth == 0 && i > 0) return i;
    }
    return name.size();
}

void simt_symbol(const void *f, char *text, size_t text_bytes)
{
    std::string name = mangled_name(f);
    int status = -1;
    char *plain = name.empty() ? nullptr
                               : abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    if (status == 0) name = plain;
    free(plain);
    if (name.compare(0, 5, "void ") == 0) name.erase(0, 5);
    name.erase(parameters_at(name));
    snprintf(text, text_bytes, "%s", name.empty() ? "a kernel" : name.c_str());
}
