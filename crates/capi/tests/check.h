/* Ends a test with the line at which something does not hold, and the words of `error`. */
#include <cowslip.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(holds)                                                                  \
    do {                                                                              \
        if (!(holds)) {                                                               \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #holds,            \
                    error ? cowslip_error_message(error) : "no error");               \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)
